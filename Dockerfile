# The image of a training pod: Python, torch (of the default index: a CUDA build), Horovod, flytekit and this package.
# Non-root. No compilers: torch.compile needs one at run time (Triton's launcher, the C++ of kernels for the CPU), which
# COMPILER=g++ puts in. Horovod reduces on the CPU (Gloo) unless HOROVOD_GPU=nccl; SafeTorch uses torch's own NCCL.
#
#   make image                                              builds it (scripts/build_image.py), also where no image can be pulled
#   make image IMAGE_OPTIONS="--gpu nccl"                   the same with a Horovod for GPUs
#   make image IMAGE_OPTIONS="--compiler g++"               the same with a compiler
#   docker build -t safedist .                              the same by hand; needs BuildKit
#
# CPU builds of torch are not on the default package index: hand in an index with PIP_EXTRA_INDEX_URL, or wheels with
# WHEELS_IMAGE (an image that holds wheel files in its root directory, and Horovod wheels of horovod_build/build.py's
# cache below /horovod). Private indexes and CA certificates come in as
# build secrets "pip_conf" and "ca", which stay out of every layer; scripts/build_image.py makes them from pip's own settings.

ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG WHEELS_IMAGE=scratch

FROM ${WHEELS_IMAGE} AS wheels


# By content, so that other changes of setup.cfg leave the layers below alone.
FROM ${BASE_IMAGE} AS metadata
COPY setup.cfg .
RUN python3 -c "import configparser; c = configparser.ConfigParser(); c.read('setup.cfg'); print(c['options']['install_requires'])" > /dependencies.txt


FROM ${BASE_IMAGE} AS builder
# python3-dev only where the base's Python comes from Debian: other bases bring their own headers.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make cmake \
 && { python3 -c "import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path('include') + '/Python.h'))" \
      || apt-get install -y --no-install-recommends python3-dev; } \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels
WORKDIR /build
ARG PIP_EXTRA_INDEX_URL=
# Empty: the one of requirements/torch.txt.
ARG TORCH=
# "nccl": Horovod for GPUs. With CUDA 13's torch the compiler comes from pip; else BASE_IMAGE must have a CUDA toolkit.
ARG HOROVOD_GPU=none
# What rarely changes comes first: torch, what Horovod's build needs, Horovod itself, flytekit; the package is last.
COPY requirements/constraints.txt requirements/torch.txt requirements/build.txt requirements/
RUN --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca.pem \
    python3 -m venv /opt/venv \
 && pip install -q -c requirements/constraints.txt pip setuptools wheel \
 && pip install -q -c requirements/constraints.txt "${TORCH:--rrequirements/torch.txt}" \
 && grep -v '^cmake' requirements/build.txt > build.txt \
 && pip install -q -c requirements/constraints.txt -r build.txt
COPY horovod_build/*.py horovod_build/
# The wheel is kept outside the layers, so that a change of these scripts that changes no wheel compiles none; nor is one
# compiled that the building machine has: same torch, Python, compiler, C library, patches and so on, or it is another key.
RUN --mount=type=cache,id=safedist-horovod,target=/var/cache/safedist-horovod \
    --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca.pem \
    { cp -rn /wheels/horovod/. /var/cache/safedist-horovod/ 2> /dev/null || true; } \
 && python horovod_build/build.py --gpu "${HOROVOD_GPU}" --cache-dir /var/cache/safedist-horovod
COPY --from=metadata /dependencies.txt .
# numpy: torch warns where it is absent, and no training is without it.
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca.pem \
    pip install -q -c requirements/constraints.txt -r dependencies.txt numpy


FROM builder AS package
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY flytekitplugins_safedist flytekitplugins_safedist
RUN pip wheel -q --no-deps --no-build-isolation --no-index --wheel-dir /package .


FROM ${BASE_IMAGE}
# /root is where pyflyte registers and packages code to unless it is told otherwise (--dest-dir /root): the user's own.
RUN useradd --uid 1000 --create-home --shell /usr/sbin/nologin flyte \
 && chown 1000:1000 /root && chmod 0755 /root
# For torch.compile, "g++"; with Python's headers where the base's Python comes from Debian, as above.
ARG COMPILER=
RUN if [ -n "${COMPILER}" ]; then \
      apt-get update \
   && apt-get install -y --no-install-recommends ${COMPILER} \
   && { python3 -c "import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path('include') + '/Python.h'))" \
        || apt-get install -y --no-install-recommends python3-dev; } \
   && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=builder /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
# Further packages of the user's own code, e.g. "scikit-learn pandas".
ARG EXTRA_PACKAGES=
ARG PIP_EXTRA_INDEX_URL=
RUN --mount=type=bind,source=requirements,target=/requirements \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca.pem \
    if [ -n "${EXTRA_PACKAGES}" ]; then \
      pip install -q --no-cache-dir --disable-pip-version-check -c /requirements/constraints.txt ${EXTRA_PACKAGES}; \
    fi
RUN --mount=type=bind,from=package,source=/package,target=/package \
    pip install -q --no-deps --no-index --no-cache-dir --disable-pip-version-check /package/*.whl
WORKDIR /home/flyte
# Numeric, so that Kubernetes' runAsNonRoot can see that it is not root. No ENTRYPOINT: Flyte sets the whole command.
USER 1000:1000
