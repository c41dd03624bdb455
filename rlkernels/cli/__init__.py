"""What `python -m rlkernels` runs; nothing else imports it."""
