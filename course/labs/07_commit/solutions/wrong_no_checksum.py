"""Two slots in turn, and a sector that says which one is valid, written in place: without a checksum nobody sees
that the sector is torn.

Says: torn
Breaks: torn, thousand_cuts, little_room
"""

import json


def header(drive):
    if "header" not in drive.names():
        return None
    data = drive.read("header").rstrip(b"\0").decode()
    return [int(x) for x in data.split(",")] if data else None


def slot_of(number):
    return f"slot{number % 2}"


def commit(drive, state):
    number = (header(drive) or [0])[0] + 1
    data = json.dumps({part: data.hex() for part, data in state.items()}).encode()
    for name in ("header", slot_of(number)):
        if name not in drive.names():
            drive.create(name)
    drive.write(slot_of(number), 0, data)
    drive.sync(slot_of(number))
    drive.sync_names()
    drive.write("header", 0, f"{number},{len(data)}".encode().ljust(512, b"\0"))
    drive.sync("header")


def recover(drive):
    if not (found := header(drive)):
        return None
    number, length = found
    return {part: bytes.fromhex(x) for part, x in json.loads(drive.read(slot_of(number))[:length]).items()}
