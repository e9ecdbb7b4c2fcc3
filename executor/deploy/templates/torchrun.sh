# Copy the folder 'job' of the job '{{ deployment.name }}' to every host. Then run there, in any order within
# {{ "%.0f" | format(deployment.hosts.arrival_s) }} s, the commands below the host's name. Every host but the head starts its agent with a torchrun
# of its own: a host that is lost must not end the others.
{% if deployment.secrets %}
# Set these variables before, from where you keep secrets: {{ deployment.secrets | join(", ") }}
{% endif %}
{% for part in deployment.hosts.parts %}

# --- {{ part.name }}
. job/environment.sh
{% if part.name == deployment.hosts.head %}
{{ deployment.command(part.name, "job") }}
{% else %}
{# The rendezvous is a file: torchrun's own would listen on every interface, for nobody. #}
rm -f job/rendezvous
OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend=c10d --rdzv-conf=store_type=file --rdzv-endpoint=job/rendezvous --nnodes=1 --nproc-per-node=1 -m executor.deploy.torchrun job {{ part.name | quote }}
{% endif %}
{% endfor %}
