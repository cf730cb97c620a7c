"""The long-lived processes and the use cases they share. Everything here loads without dagster installed."""
