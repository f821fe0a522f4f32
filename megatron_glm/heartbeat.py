"""Signs of life. Work that may take minutes beats as it goes on; the hang watchdog reads what all ranks have done."""

beats = 0
step = 0  # the training step that this rank is in; 0 before the first
before_step = 0  # beats when it began


def beat() -> None:
    global beats
    beats += 1


def begin_step(number: int) -> None:
    global step, before_step
    step, before_step = number, beats
