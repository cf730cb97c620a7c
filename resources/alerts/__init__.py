"""Alerts: tell people what is wrong. protocol.py says what is promised, log.py and http.py keep it."""
