"""What looks like vLLM, for those who port from it. Nothing outside this folder imports it."""
