#!/bin/bash
# Requests and clients of every kind on a daemon under its units for so many minutes.
. /opt/trial/installed.sh

# What is remembered is at its limits, in memory and on disk, before the second quarter ends.
cat > /etc/laned/laned.toml << END
model = "demo"
max_rows = 8
max_queue = 64
prompt_cache_bytes = "256MiB"
store = "/var/lib/laned/store"
store_max = "512MiB"
END
chgrp -R laned /etc/laned
systemctl daemon-reload
systemctl start laned.socket
set +e
say load
cd /opt/clone
HOME=/tmp TERM=dumb /opt/laned/bin/python -m tests.bench.soak --minutes "$1" --socket /run/laned/laned.sock --json /opt/trial/soak.json 2>&1
say state
show laned ActiveState
show laned NRestarts
say process
grep -E '^(NoNewPrivs|Seccomp|CapEff|CapBnd):' "/proc/$(show laned MainPID)/status"
grep -E '^VmHWM:' "/proc/$(show laned MainPID)/status" >&2
say stop
systemctl stop laned.socket laned.service
show laned Result
say journal
journalctl --boot --unit='laned*' --no-pager --output=cat
