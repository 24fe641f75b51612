# quire serve in a container:
#   docker build -t quire .                                  for CPUs
#   docker build -t quire:cuda --build-arg INSTALL_ARGS= .   for GPUs: the package index's own PyTorch brings CUDA
#   docker run -p 8000:8000 -v quire-cache:/cache quire [MODEL] [flags]
FROM python:3.12-slim

ARG EXTRAS=server,otel
ARG INSTALL_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

# The compiler makes the CPU's kernels (and Triton's launchers) at the first start; they stay in the cache.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ make \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --create-home --uid 1000 quire \
  && install --directory --owner=quire /app /cache

USER 1000
WORKDIR /app
COPY --chown=quire Makefile pyproject.toml README.md LICENSE ./
COPY --chown=quire requirements requirements
COPY --chown=quire src src
RUN make install EXTRAS="$EXTRAS" INSTALL_ARGS="--no-cache-dir $INSTALL_ARGS"

ENV PATH=/app/.venv/bin:$PATH QUIRE_CACHE=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD \
  ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Longer than docker's ten seconds: docker stop --time 40
ENTRYPOINT ["quire", "serve", "--host", "0.0.0.0"]
