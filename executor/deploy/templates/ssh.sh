#!/usr/bin/env bash
# Copies the job '{{ deployment.name }}' to its hosts and starts it there; with names of hosts, to these alone.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
options=(-o BatchMode=yes{% for option in deployment.ssh_options %} {{ option | quote }}{% endfor %})

# Starts a host's part of the job in a session of its own, which outlives this connection.
start() { # HOST ADDRESS FOLDER COMMAND
  local values state
  values="$(secrets)"
  state="$(ssh "${options[@]}" "$2" "umask 077 && mkdir -p $3 && cd $3 && if {{ running }}; then echo running; fi")"
  if [ "$state" = running ]; then echo "$1: runs already" >&2; return 1; fi
  scp -q -r "${options[@]}" "$here/job" "$2:$3/"
  printf '%s\n' "$values" | ssh "${options[@]}" "$2" "umask 077 && cd $3 &&
    . job/environment.sh && set -a && . /dev/stdin && set +a &&
    { setsid nohup $4 > $1.log 2>&1 < /dev/null & echo \$! > $1.pid; }"
  echo "$1: started"
}

secrets() {
  :
{% for name in deployment.secrets %}
  printf '{{ name }}=%q\n' "${ {{- name }}?}"
{% endfor %}
}

wanted() { # HOST REQUESTED...
  local host="$1"; shift
  [ "$#" -eq 0 ] && return 0
  for each in "$@"; do [ "$each" = "$host" ] && return 0; done
  return 1
}

{% for host, address, folder, command in hosts %}
if wanted {{ host | quote }} "$@"; then start {{ host | quote }} {{ address | quote }} {{ folder | quote }} {{ command | quote }}; fi
{% endfor %}
