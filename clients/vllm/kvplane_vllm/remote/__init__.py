"""Mode "remote": a service decides which blocks a request gets; each schedule() sends it one program of rows.

vLLM's own schedule() runs unchanged. `program` predicts what it will ask, in its order; `link` sends the prediction and
receives the answer; `books` records what the service granted; `driver` gives it to vLLM's calls, asks again for what
was not predicted, and takes back what vLLM did not use. `manager` is vLLM's KVCacheManager on top of them, and
`settings` refuses what this mode cannot express. `books`, `link` and `settings` do not import vLLM.
"""
