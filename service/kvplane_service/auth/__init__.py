"""Who calls, and what they may: certificates, tokens, owners, scopes, limits, the audit log.

files           what is read again when it changes
certificates    the service's own pair, checked before it is used
tokens, web_tokens   bearer tokens: static ones by their digests, JSON Web Tokens by public keys
owners, scopes  what each may do; identity puts these together: from a call's proof to its owner
quotas, audit   how much, and what is told of it
gate            what every call passes; visible is the registry as its caller may see it
opening         the gate of a configuration
"""
