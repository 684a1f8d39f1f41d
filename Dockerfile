# Images for CPU and for CUDA, built without a network (docs/install.md):
#
#   docker build --network none --target cpu --build-context wheels=DIR -t composer-mesh:cpu .
#
# DIR holds the wheels of requirements/run.txt and of torch. No package comes from anywhere else,
# and each is compared with its hash, but torch, whose right build depends on the machine.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS packages
COPY requirements/run.txt /requirements.txt
RUN --mount=type=bind,from=wheels,target=/wheels \
    python3 -m venv /opt/composer-mesh \
    && /opt/composer-mesh/bin/python -m pip install --no-cache-dir --no-index --find-links /wheels \
        --require-hashes --no-deps -r /requirements.txt \
    && /opt/composer-mesh/bin/python -m pip install --no-cache-dir --no-index --find-links /wheels torch

# The sources stay in this stage: with new ones, no package is installed again but this one.
FROM packages AS installed
COPY . /source
RUN /opt/composer-mesh/bin/python -m pip install --no-cache-dir --no-index --no-deps --no-build-isolation /source \
    && /opt/composer-mesh/bin/python -m pip check

FROM ${PYTHON_IMAGE} AS runtime
ENV PATH=/opt/composer-mesh/bin:$PATH
RUN useradd --create-home mesh && mkdir /work && chown mesh:mesh /work
COPY --from=installed /opt/composer-mesh /opt/composer-mesh
USER mesh
WORKDIR /work
ENTRYPOINT ["composer-mesh"]
CMD ["--help"]

# torch's wheels bring CUDA's libraries; the driver comes from the host, with --gpus all.
FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN python -c 'import torch; assert torch.version.cuda, "the wheels have a CPU build of torch: build --target cpu"'

FROM runtime AS cpu
RUN python -c 'import torch; assert torch.version.cuda is None, "the wheels have a CUDA build of torch: build --target cuda"'
