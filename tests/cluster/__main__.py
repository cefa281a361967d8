"""`make cluster-test CONTEXT=NAME IMAGE=REFERENCE`: the chart and the product on a real Kubernetes.

It runs on the context that is named, in namespaces of its own, and removes them. README.md says what it checks. Exit
status: 0 = no row failed, 1 = a row failed, 2 = it was called wrongly or the cluster may not be used: nothing was made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvplane.base.errors import InvalidArgument, KvplaneError
from tests.cluster import access
from tests.cluster.cases import CASES, chosen
from tests.cluster.cluster import Cluster, Image, Images, fresh_folder
from tests.cluster.runs import Run
from tests.cluster.table import Table

FORM = "REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@sha256:..."


def main(arguments: Sequence[str]) -> int:
    try:
        given = parse(arguments)
        access.check_context(given.context)
        images, cases = images_of(given), chosen(given.only)
        found = access.check(given.context)
    except KvplaneError as error:
        print(access.line_of(error), file=sys.stderr)
        return 2
    table = Table(lambda line: print(line, flush=True))
    run = Run(Cluster(given.context, images), found, fresh_folder(), table)
    print(f"{found.version}, {found.nodes} nodes, context {given.context}; namespaces {run.name}-*", flush=True)
    print(f"image {images.service.reference}", flush=True)
    try:
        for case in cases:
            case(run)
    finally:
        run.end()
    print(table.summary())
    return 0 if table.is_good else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--context", default="", help="of KUBECONFIG; never the current one")
    parser.add_argument("--image", default="", help=f"of the service: {FORM}; its nodes have it or can pull it")
    parser.add_argument("--worker-image", default="", help="of the worker; without it no worker runs")
    parser.add_argument("--store-image", default="", help="of Valkey [default: the chart's]")
    parser.add_argument("--only", nargs="*", default=[], help=f"cases: {', '.join(CASES)} [default: all]")
    return parser.parse_args(arguments)


def images_of(given: argparse.Namespace) -> Images:
    """The images that are stated. Raises InvalidArgument."""
    service = _image(given.image, "IMAGE")
    if service is None:
        raise InvalidArgument("no image is stated", field="IMAGE", remedy=f"IMAGE={FORM}, by docker/service.Dockerfile")
    return Images(service, _image(given.worker_image, "WORKER_IMAGE"), _image(given.store_image, "STORE_IMAGE"))


def _image(reference: str, field: str) -> Image | None:
    image = Image.of(reference) if reference else None
    if reference and image is None:
        raise InvalidArgument(f"{reference[:200]!r} names no image", field=field, remedy=f"state {FORM}")
    return image


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
