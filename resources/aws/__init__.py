"""What AWS gives this process besides objects: tokens to log in with, and secrets by name. No port stands here.

Credentials are those of `tile_store.credentials`: boto3's chain, so that one role serves all. Errors name the setting
and what was asked for; a token or secret is in no message and no log.
"""
