"""Authenticate and authorize calls: the credentials of a call come in; its owner or a refusal goes out.

gate                 encloses every call: authentication, authorization, limits, audit log
identity             finds the owner that the credentials of a call belong to
tokens, web_tokens   verify bearer tokens: static tokens by their digests, JSON Web Tokens by public keys
certificates, files  read the service's certificate, and read files again when they change
owners, scopes       the permissions of each owner, and the permission that each method requires
quotas, audit        limit the calls of each owner, and write the audit log
visible              the registry without the replicas that the caller may not see
"""
