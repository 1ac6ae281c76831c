# To be sourced, as root, inside a system that has just been started for it: the units of deploy/, as they stand there.
# /opt/trial is a folder of the test's, /opt/clone this clone, /opt/venv and /opt/python its packages and its Python.
exec 2> /opt/trial/errors
set -e
say() { printf '\n== %s\n' "$1"; }
show() { systemctl show "$1" --property="$2" --value; }

mkdir -p /opt/laned/bin /etc/laned /etc/sysusers.d
site=$(echo /opt/venv/lib/python3*/site-packages)
cat > /opt/laned/bin/python << END
#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/clone:$site PYTHONDONTWRITEBYTECODE=1
exec /opt/python/bin/python3 -P "\$@"
END
printf '#!/bin/sh\nexec /opt/laned/bin/python -m scheduler.cli "$@"\n' > /opt/laned/bin/laned
chmod 755 /opt/laned/bin/*
cp /opt/clone/deploy/systemd/laned*.s[eo]* /etc/systemd/system/
cp /opt/clone/deploy/systemd/laned.sysusers /etc/sysusers.d/laned.conf
systemd-sysusers
chgrp -R laned /etc/laned
