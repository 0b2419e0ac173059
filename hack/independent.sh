#!/usr/bin/env bash
# Lets programs that we did not write read our side of SGLang's contract:
# SGLang's own router (the sglang-router wheel, and the mini load balancer in
# it) drives the emulators in PD mode, and the openai client talks to them and
# to a whole pool behind our router.
#
#   hack/independent.sh            set up, then run test/independent
#   hack/independent.sh --setup    only set up; prints the Python to use
#
# Needs python3 with venv, and PyPI once. The environment is kept under
# ${XDG_CACHE_HOME:-~/.cache}/kvc/independent; remove it to start afresh.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(sglang-router==0.3.2 openai==3.57.0)
venv="${XDG_CACHE_HOME:-$HOME/.cache}/kvc/independent"
stamp="$venv/kvc-packages"

setup() {
	[ "$(cat "$stamp" 2>/dev/null)" = "${packages[*]}" ] && return
	command -v python3 >/dev/null || { echo "independent: python3 is not here" >&2; return 1; }
	mkdir -p "$(dirname "$venv")"
	python3 -m venv "$venv" >&2 || { echo "independent: python3 has no venv module" >&2; return 1; }
	"$venv/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" >&2 ||
		{ echo "independent: PyPI does not give ${packages[*]}" >&2; return 1; }
	echo "${packages[*]}" >"$stamp"
}

setup
if [ "${1:-}" = --setup ]; then
	echo "$venv/bin/python"
	exit
fi
KVC_INDEPENDENT=1 go test -count=1 -v ./test/independent
