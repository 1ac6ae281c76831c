"""`laned gateway`: HTTP in front of the daemon's socket, a process of its own and a plain client.

command     the flags; what they say is a Settings
server      from start to end: sockets, signals, Hypercorn
app         the routes, and what goes around all of them: guard (keys, origins, sizes), metrics
relay       one request: connect, submit, pass on what comes, until it ends or its client goes
dialect     what the four APIs have in common; chat, completions, responses and messages are one each

A dialect is pure: a body becomes options of scheduler.client's submit, deltas become events. Only server, app, guard,
relay and daemon wait for anything.
"""
