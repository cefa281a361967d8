# The service, and every command but `kvplane worker`. From the root of the repository:
#     docker build --file docker/service.Dockerfile --tag kvplane/service .
# To pin the base image: --build-arg PYTHON_DIGEST=@sha256:...
ARG PYTHON_TAG=3.13-slim-bookworm
ARG PYTHON_DIGEST=

FROM docker.io/library/python:${PYTHON_TAG}${PYTHON_DIGEST} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++
WORKDIR /src
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY clients/python clients/python
COPY service service
COPY gpu_worker gpu_worker
COPY locks locks
RUN python -m venv /opt/kvplane && python -m venv /src/tools
RUN /opt/kvplane/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --requirement locks/service.txt
RUN /src/tools/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --requirement locks/build.txt
RUN KVPLANE_BUILD=native PATH=/src/tools/bin:$PATH hatchling build --target wheel --directory /src/dist
RUN /opt/kvplane/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /src/dist/*.whl

FROM docker.io/library/python:${PYTHON_TAG}${PYTHON_DIGEST}
COPY --from=build /opt/kvplane /opt/kvplane
# The root file system may be read-only, and the user has no name: files are written here.
ENV PATH=/opt/kvplane/bin:$PATH HOME=/var/tmp TMPDIR=/var/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="kvplane service" \
      org.opencontainers.image.description="Control plane of the KV cache of LLM inference engines" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
EXPOSE 7070 7071 9464
ENTRYPOINT ["kvplane"]
CMD ["serve", "--listen", "0.0.0.0:7070", "--set", "health_listen=0.0.0.0:7071", "--metrics", "0.0.0.0:9464"]
