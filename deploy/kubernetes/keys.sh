#!/usr/bin/env bash
# Makes CURVE keys for a router and for workers, and Kubernetes Secrets of them. Keys that are there
# stay: to add workers, call it again with larger numbers, and apply again.
#   deploy/kubernetes/keys.sh DIRECTORY [NUM_PREFILL [NUM_DECODE]]    # 2 and 2 where not given
#   kubectl apply -k DIRECTORY
# DIRECTORY then holds the secret keys of all: keep it to yourself.
set -euo pipefail

[ $# -ge 1 ] && [ $# -le 3 ] || { echo "usage: $0 DIRECTORY [NUM_PREFILL [NUM_DECODE]]" >&2; exit 2; }
directory=$1
num_prefill=${2:-2}
num_decode=${3:-2}
for count in "$num_prefill" "$num_decode"; do
    [[ $count =~ ^[1-9][0-9]{0,3}$ ]] || { echo "$0: error: '$count' is no number of workers" >&2; exit 2; }
done
kvxfer=${KVXFER:-kvxfer}
command -v "$kvxfer" >/dev/null || { echo "$0: error: no command kvxfer: set KVXFER to its path" >&2; exit 2; }

umask 077
keys() { # ROLE COUNT: the names of the workers' pods, which those of their keys are
    for ((i = 0; i < $2; i++)); do echo "kvxfer-$1-$i"; done
}
for name in kvxfer-router $(keys prefill "$num_prefill") $(keys decode "$num_decode"); do
    [ -e "$directory/$name.key" ] || "$kvxfer" keygen "$directory" "$name" >/dev/null
done

secret() { # NAME PATTERN: a Secret of all files like that, also of workers that there were before
    echo "  - name: $1"
    echo "    files:"
    (cd "$directory" && printf '      - %s\n' $2)
}
{
    echo "# Written by deploy/kubernetes/keys.sh."
    echo "apiVersion: kustomize.config.k8s.io/v1beta1"
    echo "kind: Kustomization"
    echo "generatorOptions:"
    echo "  disableNameSuffixHash: true # a key that comes or goes replaces no pod"
    echo "secretGenerator:"
    secret kvxfer-router-key 'kvxfer-router.key'
    secret kvxfer-prefill-keys 'kvxfer-prefill-*.key'
    secret kvxfer-decode-keys 'kvxfer-decode-*.key'
    secret kvxfer-peers '*.pub'
} >"$directory/kustomization.yaml"
echo "$directory: keys of $num_prefill prefill and $num_decode decode workers and a router"
