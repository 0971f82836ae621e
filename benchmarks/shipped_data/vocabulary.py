"""Names, paths and harmless lines that the generated scripts are filled with."""

from string import Template

POOLS: dict[str, tuple[str, ...]] = {
    "dirvar": ("BUILD_DIR", "CACHE_DIR", "STAGE_DIR", "TARGET", "WORKDIR", "DEST", "SPOOL", "SCRATCH", "OUTPUT_DIR", "ROOTFS"),
    "filevar": ("src", "input", "archive", "report", "file", "name", "path", "item", "dump", "image"),
    "plainvar": ("copy", "entry", "current", "picked", "base", "label", "chosen", "wanted"),
    "secretvar": ("API_TOKEN", "DB_PASSWORD", "SIGNING_KEY", "DEPLOY_SECRET", "SESSION_KEY"),
    "devvar": ("DEV", "DISK", "VOLUME", "PARTITION"),
    "numvar": ("shard", "port", "slot", "delay", "bucket", "offset"),
    "path": (
        "/srv/app",
        "/opt/web",
        "/var/lib/shop",
        "/data/media",
        "/srv/wiki",
        "/opt/search",
        "/var/lib/mail",
        "/data/export",
        "/home/ci/work",
    ),
    "app": ("billing", "gateway", "catalog", "frontend", "worker", "indexer", "mailer", "metrics", "portal", "scheduler"),
    "tool": ("install", "bootstrap", "setup", "agent", "upgrade", "provision"),
    "job": ("resize", "crawl", "export", "compress", "scan", "import"),
    "host": ("example.com", "mirror.example.net", "git.example.org", "files.example.com", "repo.example.net"),
    "user": ("deploy", "backup", "ci", "www", "ops", "builder"),
    "conf": ("/etc/hosts", "/etc/fstab", "/etc/sysctl.conf", "/etc/profile", "/etc/environment", "/etc/app.conf"),
    "line": ("vm.swappiness=10", "export EDITOR=vi", "net.core.somaxconn=1024", "10.0.0.5 registry", "tmpfs /scratch tmpfs", "umask=022"),
    "log": ("/var/log/usage.log", "/var/log/sync.log", "/var/log/summary.txt", "/var/log/sizes.txt", "/var/log/audit.log"),
    "ext": ("log", "tmp", "csv", "gz", "bak", "json"),
    "db": ("orders", "users", "events", "sessions", "invoices"),
    "remote": ("upstream", "staging", "production", "mirror"),
    "image": ("nginx", "redis", "postgres", "alpine", "python"),
    "version": ("1.4", "2.0", "2.7", "3.1", "0.9", "1.12"),
    "number": ("3", "5", "8", "10", "16", "20", "42", "64", "100"),
    "digest": ("3fa9c1", "b07e52", "91d4aa", "c5528f", "7e10bd", "e84f06"),
    "function": ("apply", "run_step", "process", "main_task", "perform", "finish"),
    "word": ("nightly", "weekly", "release", "staging", "manual", "hourly", "emergency", "routine"),
    "task": ("backup", "deploy", "rotation", "cleanup", "build", "sync", "migration", "provisioning", "export", "maintenance"),
}

HEADERS = ("#!/bin/bash", "#!/usr/bin/env bash", "#!/bin/bash\nset -eu", "#!/usr/bin/env bash\nset -euo pipefail", "#!/bin/bash\nset -u")
TITLES = ("# @word @task for @app", "# @task of @app", "# @app: @word @task", "# run by cron, @word @task", "")

# No line here matches a pattern that the labels depend on: a filler never changes the label.
FILLERS = (
    'echo "starting @word @task"',
    'echo "@app @task: step @number"',
    'echo "@task finished"',
    "# keep @app available meanwhile",
    "# see the @word runbook",
    "# owner: @user",
    "systemctl stop @app",
    "systemctl reload @app",
    "systemctl is-active @app || true",
    "sleep @number",
    "df -h @path",
    "free -m",
    "uptime",
    "export APP_ENV=@word",
    "readonly RETRIES=@number",
    "chmod 750 @path",
    "chown @user: @path",
    "logger -t @app '@task running'",
    "docker image prune -f",
    "docker pull @image:@version",
    "git fetch --quiet origin",
    "git status --short",
    "trap 'echo \"@task interrupted\"' INT",
    "nice -n @number ./bin/@app --check",
    "curl -fsS https://@host/health > /dev/null || true",
    "if [ -f @path/maintenance ]; then\n  echo 'maintenance window'\nfi",
    'for node in a b c; do\n  ssh "$node" uptime\ndone',
    'for i in 1 2 3; do\n  echo "attempt $i"\ndone',
    'while read -r row; do\n  echo "$row"\ndone < @path/hosts.txt',
    "cat <<EOF\n@word @task of @app\nEOF",
    'notify() {\n  logger -t @app "$1"\n}\nnotify "@task"',
    "if ! command -v jq > /dev/null; then\n  echo 'jq missing' >&2\n  exit 1\nfi",
)


class ScriptTemplate(Template):
    """A string template whose placeholders begin with @, because $ belongs to the shell."""

    delimiter = "@"
