"""Look for known advisories about what is installed in this environment: `make audit`.

pip-audit asks PyPI's advisory service for each package. On a machine without a way to that service it
reports an error, or that PyPI has no such package. So the service is first asked about a release with
advisories that are known. If it names none, the machine cannot audit: this says so and succeeds. Every
finding fails, and so does an answer that ends halfway.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KNOWN = "jinja2==2.4.1"
"""A release with several advisories, the oldest from 2014. It is not installed."""
IGNORED = HERE / "audit-ignored.txt"
"""Advisories that do not concern this project: one identifier a line, and the reason behind `#`."""
_TIMEOUT_S = 15
_LIMIT_S = 600


def main() -> int:
    """Audit; return the exit status."""
    reason = unreachable()
    if reason is not None:
        print(f"audit: no advisory service can be asked from here, so no package was audited: {reason}")
        return 0
    options = [each for line in ignored() for each in ("--ignore-vuln", line)]
    status, found, said = audit("--local", "--skip-editable", *options)
    if found is None:
        print(f"audit: pip-audit ended without a report, exit status {status}:\n{said}")
        return 1
    findings = [each for each in found if each.get("vulns")]
    skipped = [each for each in found if "skip_reason" in each]
    for each in findings:
        for vuln in each["vulns"]:
            fixed = ", ".join(vuln["fix_versions"]) or "no release"
            print(f"audit: {each['name']} {each['version']}: {vuln['id']}, fixed in {fixed}")
    if skipped:
        print(f"audit: not on PyPI, and not audited: {', '.join(each['name'] for each in skipped)}")
    if len(skipped) == len(found):
        print("audit: no package was audited, though the service answered before: run this again")
        return 1
    print(f"audit: {len(found) - len(skipped)} packages, {len(findings)} with advisories")
    return 1 if findings or status else 0


def unreachable() -> str | None:
    """Return why no service can be asked; None if one answers truthfully."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "known.txt")
        listed.write_text(f"{KNOWN}\n")
        _, found, said = audit("--requirement", str(listed), "--no-deps", "--disable-pip")
    if found is None:
        return said.strip().splitlines()[-1] if said.strip() else "pip-audit said nothing"
    if any(each.get("vulns") for each in found):
        return None
    reasons = [each["skip_reason"] for each in found if "skip_reason" in each]
    why = reasons[0] if reasons else "it names none"
    return f"asked about {KNOWN}, an old release with known advisories that is not installed: {why}"


def audit(*options: str) -> tuple[int, list[dict[str, Any]] | None, str]:
    """Run pip-audit; return its status, its report if it made one, and what else it said."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, "--timeout", str(_TIMEOUT_S), *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return 1, None, f"no answer within {_LIMIT_S} s"
    try:
        return done.returncode, json.loads(done.stdout)["dependencies"], done.stderr
    except (ValueError, KeyError, TypeError):
        return done.returncode, None, done.stdout + done.stderr


def ignored() -> list[str]:
    """Return the identifiers of advisories that are left out."""
    lines = (line.partition("#")[0].strip() for line in IGNORED.read_text().splitlines())
    return [line for line in lines if line]


if __name__ == "__main__":
    sys.exit(main())
