# Run by train.py with exec(), in its own globals: words of the command line are files of settings or --key=value.
import sys
from ast import literal_eval

for word in sys.argv[1:]:
    if "=" not in word:
        assert not word.startswith("--")
        exec(open(word).read())
        continue
    assert word.startswith("--")
    key, value = word[2:].split("=")
    if key not in globals():
        raise ValueError(f"Unknown config key: {key}")
    try:
        value = literal_eval(value)
    except (SyntaxError, ValueError):
        pass  # it is text
    assert type(value) == type(globals()[key])
    print(f"Overriding: {key} = {value}")
    globals()[key] = value
