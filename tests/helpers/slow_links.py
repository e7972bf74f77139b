"""A switch with slow ports: it delays each frame, and limits the rate in bits per second from each port.

    python slow_links.py DELAY RATE DEVICE ...

It must run in the network namespace of the devices, which must not belong to a bridge. It prints ``ready``, and
forwards until its standard input ends. It uses raw sockets because not every kernel has ``tc netem``.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
ETH_P_ALL = 3
# A link delivers segments that are not yet cut into packets, and without computed checksums. A header describes this,
# and is passed on to the next link.
LINK_HEADER = 10  # sizeof(struct virtio_net_hdr)
FRAME = LINK_HEADER + 14 + (1 << 16)
BROADCAST = b"\xff" * 6
BUFFER = 1 << 26  # bytes


def open_port(device: str) -> socket.socket:
    """A socket that receives all frames arriving at a device, for any address, and sends by the device."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # receives nothing before it is bound
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for direction in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        port.setsockopt(socket.SOL_SOCKET, direction, BUFFER)
    port.bind((device, ETH_P_ALL))
    return port


def forward(ports: list[socket.socket], delay: float, rate: float) -> None:
    """Forward frames until standard input ends.

    Args:
        ports: ports of the switch.
        delay: delay of each frame, in seconds.
        rate: maximum bits per second from one port.
    """
    behind: dict[bytes, socket.socket] = {}  # the port of each address that has sent a frame
    free = dict.fromkeys(ports, 0.0)  # the time when the link from a port has carried all earlier frames
    due: list[tuple[float, int, bytes, socket.socket]] = []
    numbers = itertools.count()
    while True:
        wait = None if not due else max(0.0, due[0][0] - time.monotonic())
        readable, _, _ = select.select([*ports, sys.stdin], [], [], wait)
        if sys.stdin in readable:
            return
        for port in readable:
            frame = port.recv(FRAME)
            to, sender = frame[LINK_HEADER : LINK_HEADER + 6], frame[LINK_HEADER + 6 : LINK_HEADER + 12]
            behind[sender] = port
            free[port] = max(free[port], time.monotonic()) + 8 * (len(frame) - LINK_HEADER) / rate
            known = behind.get(to)
            for other in ports if known is None or to == BROADCAST else [known]:
                if other is not port:
                    heapq.heappush(due, (free[port] + delay, next(numbers), frame, other))
        while due and due[0][0] <= time.monotonic():
            _, _, frame, port = heapq.heappop(due)
            port.send(frame)


if __name__ == "__main__":
    opened = [open_port(device) for device in sys.argv[3:]]
    print("ready", flush=True)
    forward(opened, float(sys.argv[1]), float(sys.argv[2]))
