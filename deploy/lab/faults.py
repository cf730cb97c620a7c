"""What can go wrong with the lab, said to whoever started it."""


class LabFault(Exception):
    """Something the lab needs is missing or did not start; the message says what and what to do."""
