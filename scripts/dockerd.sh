#!/bin/sh
# Start a docker daemon of our own where none answers, and stop it again.
#
#   scripts/dockerd.sh start    nothing to do when a daemon answers; otherwise needs root and the dockerd program
#   scripts/dockerd.sh stop     stops the one that `start` started, and only that one; images stay for the next time
#   scripts/dockerd.sh remove   stops it and removes its images, containers and state
#
# SAFEDIST_DOCKERD_DIR: where it keeps everything; default below the user's cache directory.
set -eu

state="${SAFEDIST_DOCKERD_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/flytekitplugins-safedist/dockerd}"
pid_file="$state/dockerd.pid"
log="$state/dockerd.log"
deadline_s=180

answers() {
    docker version >/dev/null 2>&1
}

# The process behind the pid file, if it is still a dockerd: pids are used again after a reboot.
running_pid() {
    pid="$(cat "$pid_file" 2>/dev/null)" || return 1
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] && echo "$pid"
}

start() {
    if answers; then
        echo "dockerd.sh: a docker daemon answers"
        return
    fi
    for program in docker dockerd; do
        command -v "$program" >/dev/null || { echo "dockerd.sh: no $program on PATH; Debian: apt-get install docker.io" >&2; exit 1; }
    done
    [ "$(id -u)" = 0 ] || { echo "dockerd.sh: no docker daemon answers, and only root can start one" >&2; exit 1; }
    mkdir -p "$state"
    # Its own session, so that Ctrl-C in the caller's terminal does not reach it: containers are removed first.
    setsid dockerd --data-root "$state/data" --exec-root "$state/exec" --pidfile "$pid_file" >"$log" 2>&1 </dev/null &
    child=$!
    waited=0
    until answers; do
        if ! kill -0 "$child" 2>/dev/null || [ "$waited" -ge "$deadline_s" ]; then
            echo "dockerd.sh: dockerd did not come up within $deadline_s s; the end of $log:" >&2
            tail -n 15 "$log" >&2
            exit 1
        fi
        sleep 1
        waited=$((waited + 1))
    done
    echo "dockerd.sh: started dockerd; log: $log"
}

stop() {
    pid="$(running_pid)" || { echo "dockerd.sh: no daemon of ours runs"; return; }
    kill "$pid"
    waited=0
    while running_pid >/dev/null; do
        if [ "$waited" -ge "$deadline_s" ]; then
            kill -9 "$pid"
            break
        fi
        sleep 1
        waited=$((waited + 1))
    done
    echo "dockerd.sh: stopped dockerd"
}

case "${1:-}" in
start) start ;;
stop) stop ;;
remove)
    stop
    # What a killed daemon left mounted; the deepest first.
    awk -v dir="$state/" 'index($2, dir) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r umount -l
    rm -rf "$state"
    ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
