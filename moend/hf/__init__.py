"""What is known of transformers' insides; another version than those tested is told when this is imported."""

from moend.version import warn_untested

warn_untested("transformers")
