#!/bin/bash
set -x
export PYTHONUNBUFFERED=1
# Don't forget: a folder of your own.
MODEL_PATH="models/qwen"
DATA=${DATA_ROOT}/shapes
TRAIN_SET="${DATA}@train"
NAME=${RUN_NAME:-shapes_grpo}

CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 -m rllava.train.pipeline.rlvr \
    config=tests/rigs/imported/rllava.yaml \
    data.train_files=${TRAIN_SET} \
    data.train_batch_size=32 \
    actor.ppo_mini_batch_size=8 \
    actor.clip_ratio_high=0.28 \
    actor.model.model_path=${MODEL_PATH} \
    actor.model.use_peft=false \
    rollout.n=8 \
    trainer.experiment_name=$NAME
