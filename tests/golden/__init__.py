"""One module per group of golden files; each exports ``CHECKS = {stem: check of one case}``."""
