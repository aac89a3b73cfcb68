"""A reward."""


def short(sample):
    return -float(len(sample.completion))
