"""Authentication and authorization: the credentials of a call come in, its owner or a refusal goes out.

gate                 what every call passes, `CALL` with its owner, and the gate that a configuration asks for
identity             from the credentials of a call to its owner
tokens, web_tokens   bearer tokens: static ones by their digests, JSON Web Tokens by public keys
certificates, files  certificates, and files that are read again when they change
owners, scopes       what each owner may use, and the scope that each method requires
quotas, audit        limits per owner; the audit log
visible              the registry as the caller may see it
"""
