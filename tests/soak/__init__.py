"""Soak test: a long run of `kvplane serve` under churn. Nothing may grow once its logs are full."""
