"""The arguments of transformers' Trainer and TRL's as settings of a training: `TrainSettings.trainer_args`.

fields       every field of TrainingArguments, SFTConfig and DPOConfig, in fields.toml, and a file read by them
schedules    the Trainer's learning rates
mapping      what a file decides
"""
