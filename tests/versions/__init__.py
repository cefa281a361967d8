"""What an earlier version of kvplane wrote, and that this one reads it: stores, messages, states, recordings."""
