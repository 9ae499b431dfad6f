"""A sweep as a page, tables and figures, beside published numbers."""
