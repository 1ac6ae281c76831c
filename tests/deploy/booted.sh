#!/bin/bash
# What is asked of a daemon under its units, one thing after another.
. /opt/trial/installed.sh

printf 'model = "demo"\nmax_rows = 4\nallow_group = ["laned"]\n' | tee /etc/laned/laned.toml > /etc/laned/small.toml
printf 'store = "/var/lib/laned/store"\nmetrics_port = 0\n' >> /etc/laned/laned.toml
echo 'store_socket = "/run/laned/store.sock"' >> /etc/laned/small.toml
chgrp -R laned /etc/laned
# Shorter than any unit has it, for the test's sake; everything else is as it is installed.
mkdir -p /run/systemd/system/laned.service.d
printf '[Service]\nWatchdogSec=10s\n' > /run/systemd/system/laned.service.d/watchdog.conf
systemctl daemon-reload

ask() { /opt/laned/bin/laned ask --raw --wait 300 --max-tokens 3 "$@"; }
as_nobody() { setpriv --reuid=nobody --regid=nogroup "$@"; }

systemctl start laned.socket
set +e
say socket
stat --format='%A %U %G' /run/laned/laned.sock
say friend
export HOME=/tmp
as_nobody --groups="$(getent group laned | cut -d: -f3)" bash -c "$(declare -f ask); ask --socket /run/laned/laned.sock 'The capital of France is'"
say stranger
as_nobody --clear-groups bash -c "$(declare -f ask); ask --socket /run/laned/laned.sock Hello" 2>&1
say state
show laned ActiveState
show laned StatusText
say process
grep -E '^(NoNewPrivs|Seccomp|CapEff|CapBnd):' "/proc/$(show laned MainPID)/status"
say metrics
port=$(/opt/laned/bin/laned status --socket /run/laned/laned.sock --json | sed 's/.*"metrics_port": \([0-9]*\).*/\1/')
/opt/laned/bin/python -c 'import sys, urllib.request as web
print(web.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics").read().decode())' "$port" | grep -o '^process_[a-z_]*' | sort
say written
find /var/lib/laned /var/cache/laned -type f | sed 's/[0-9a-f]\{32\}/X/g' | sort -u
say reload
echo 'max_tokens = 5' >> /etc/laned/laned.toml
systemctl reload laned
show laned ActiveState

say watchdog
[ "$(show laned MainPID)" = 0 ] || kill -STOP "$(show laned MainPID)"
for _ in $(seq 120); do
    [ "$(show laned NRestarts)" = 1 ] && break
    sleep 0.5
done
show laned NRestarts
ask --socket /run/laned/laned.sock 'The capital of France is'

say stop
systemctl stop laned.socket laned.service
show laned Result
ls /run/laned

say instance
systemctl start laned-store.socket laned@small.socket
ask --socket /run/laned/small.sock 'The capital of France is'
show laned@small ActiveState
show laned-store ActiveState
systemctl stop laned@small.socket laned@small.service laned-store.socket laned-store.service
show laned@small Result
show laned-store Result
say journal
journalctl --boot --unit='laned*' --no-pager --output=cat
