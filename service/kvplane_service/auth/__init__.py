"""Who calls, and what they may: certificates, tokens, owners, scopes, limits, the audit log.

files           what is read again when it changes
certificates    the service's own pair, checked before it is used
"""
