"""What the process imports whose copies are workers: a SIGTERM to all processes of a job is for the workers, which then
save their state, and not for this one, which tells when they have ended. It ends with the command; copies let it in."""

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
