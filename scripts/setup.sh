# Sourced by demo and test: `setup_environment` makes .venv in the checkout.
#
# It installs once, and again when pyproject.toml changed or the checkout was moved.
# Sets root (the checkout) and python (of .venv).

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
python="$venv/bin/python"

# An open range would take the newest build, with gigabytes for GPUs, over a CPU build that is there.
torch="torch==2.13.0"
extras="export,dev"
# TensorRT for RTX builds without a GPU. It has no package for other machines than these.
if [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then
  extras="$extras,tensorrt-rtx"
fi

say() {
  printf '==> %s\n' "$*" >&2
}

fail() {
  printf 'Error: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

# A shim of a version manager may be there and not run, so every candidate is tried.
find_python() {
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# What the environment was made from: two lines, the place of the checkout and the requirements.
fingerprint() {
  "$python" -c '
import hashlib, pathlib, sys
root, *requirements = sys.argv[1:]
data = pathlib.Path(root, "pyproject.toml").read_bytes() + " ".join(requirements).encode()
print(root, hashlib.sha256(data).hexdigest(), sep="\n")
' "$root" "$torch" "$extras"
}

install() {
  "$python" -m pip install --quiet --disable-pip-version-check --no-input "$@"
}

setup_environment() {
  local stamp="$venv/installed-from" base
  if "$python" -c '' >/dev/null 2>&1 && [ -f "$stamp" ]; then
    [ "$(cat "$stamp")" != "$(fingerprint)" ] || return 0
  fi
  # Scripts in an environment name its path, so one that was moved or left half made starts anew.
  if [ ! -f "$stamp" ] || [ "$(head -n 1 "$stamp")" != "$root" ] || ! "$python" -c '' >/dev/null 2>&1; then
    base="$(find_python)" || fail "no Python 3.11 or newer with the modules venv and ensurepip" \
      "install Python 3.11, 3.12 or 3.13 (on Debian and Ubuntu also its package python3-venv)"
    say "Environment in .venv, with $("$base" --version)"
    "$base" -m venv --clear "$venv"
  fi
  rm -f "$stamp"
  say "pip install $torch"
  install "$torch"
  say "pip install -e .[$extras]"
  install -e "$root[$extras]"
  fingerprint >"$stamp"
}
