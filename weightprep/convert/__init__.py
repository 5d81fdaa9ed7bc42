"""From one checkpoint directory to another: plan, execute with a journal, verify, report."""
