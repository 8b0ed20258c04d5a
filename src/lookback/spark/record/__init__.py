"""What a stream obeyed, and when: its rules, commands, lists and declarations, by the rows of rule_log.

This package must not know why anyone asks: a rebuild, a proof, a backtest or an explanation.
"""
