"""Both managers side by side: random operations drive vLLM 0.33.0 and kvplane's core, every answer is compared."""
