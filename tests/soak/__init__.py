"""A long run of one real `kvplane serve` under churn: does anything grow once its logs are full?"""
