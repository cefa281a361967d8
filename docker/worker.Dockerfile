# The GPU worker: `kvplane worker`. From the root of the repository:
#     docker build --file docker/worker.Dockerfile --tag kvplane/worker .
# EXTRA selects the build: worker-cuda12, worker-cuda13, or worker for pages in CPU memory. CUDA's libraries come with
# torch, the driver's from the node. To pin the base image: --build-arg PYTHON_DIGEST=@sha256:...
ARG PYTHON_TAG=3.13-slim-bookworm
ARG PYTHON_DIGEST=

FROM docker.io/library/python:${PYTHON_TAG}${PYTHON_DIGEST} AS build
ARG EXTRA=worker-cuda12
RUN apt-get update && apt-get install --yes --no-install-recommends g++
WORKDIR /src
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY clients/python clients/python
COPY service service
COPY gpu_worker gpu_worker
RUN python -m venv /opt/kvplane
RUN KVPLANE_BUILD=native /opt/kvplane/bin/pip install --no-cache-dir --disable-pip-version-check ".[${EXTRA},cli]"

FROM docker.io/library/python:${PYTHON_TAG}${PYTHON_DIGEST}
COPY --from=build /opt/kvplane /opt/kvplane
# The root file system may be read-only, and the user has no name: Triton's kernels are written here.
ENV PATH=/opt/kvplane/bin:$PATH HOME=/var/tmp TMPDIR=/var/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="kvplane worker" \
      org.opencontainers.image.description="GPU worker of kvplane: holds the pages of a KV cache" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
ENTRYPOINT ["kvplane"]
CMD ["worker", "--help"]
