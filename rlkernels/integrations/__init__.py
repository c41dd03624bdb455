"""Adapters for trainers. `import rlkernels` imports none; a trainer is imported when it is patched."""
