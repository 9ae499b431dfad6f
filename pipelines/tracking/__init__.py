"""W&B as a view of finished files: what to publish, writing runs, uploads, dashboards."""
