#!/usr/bin/env bash
# Launches the job '{{ deployment.name }}': a cluster of one node for each host, the head's first.
set -euo pipefail
cd "$(dirname "$0")"
{% macro launch(host) -%}
sky launch --yes --detach-run --cluster {{ deployment.name }}-{{ host }}{% for name in deployment.secrets %} --secret {{ name }}{% endfor %}
{%- endmacro %}
{{ launch(deployment.hosts.head) }} sky-{{ deployment.hosts.head }}.yaml
{% if deployment.hosts.address %}
head={{ deployment.hosts.address | quote }}
{% else %}
head="$(sky status --ip {{ deployment.name }}-{{ deployment.hosts.head }})"
{% endif %}
{% for host in deployment.hosts.others %}
{{ launch(host) }} --env ROPEBRIDGE_HEAD="$head" sky-{{ host }}.yaml
{% endfor %}
