"""A command, and an option of another one."""


def greet(arguments):
    print(f"hello {arguments.name}")
    return 0


def note(arguments):
    print(f"note: {arguments.acme_note}")
