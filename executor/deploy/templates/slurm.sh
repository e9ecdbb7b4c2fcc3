#!/usr/bin/env bash
#SBATCH --job-name={{ deployment.name }}
#SBATCH --output=slurm.log
{% for part in deployment.hosts.parts %}
{% if not loop.first %}
#SBATCH hetjob
{% endif %}
#SBATCH --nodes=1
#SBATCH --ntasks=1
{% for option in options[part.name] %}
#SBATCH {{ option }}
{% endfor %}
{% endfor %}
set -euo pipefail
# Unless the hosts file gives its address, the head is reached by the name of the first node.
head={{ deployment.hosts.address | quote }}
nodes="${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}"
head="${head:-$(scontrol show hostnames "$nodes" | head -n 1)}"
# sbatch passes on the environment, and with it the secrets.
{{ exports }}
{%- if commands | length == 1 %}
srun {{ commands[0] }}
{% else %}
{# A host that is lost must not end the others. #}
srun --kill-on-bad-exit=0 {% for command in commands %}--het-group={{ loop.index0 }} {{ command }}{{ " : \\\n  " if not loop.last }}{% endfor %}

{% endif %}
