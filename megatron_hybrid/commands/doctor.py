"""Check the installation: what was built and for what, which devices and gemm backends can be used and why others
cannot, whether each patch to Megatron fits the installed version, and what is used of Apex.

Exit status 0 when training can start here, 1 when something that it needs is missing (marked FAIL).
"""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 when one of them is a failure."""
    from ..observe.doctor import examine

    findings = examine()
    if args.json:
        print(json.dumps([finding.record() for finding in findings], indent=1))
    else:
        section = None
        for finding in findings:
            if finding.section != section:
                section = finding.section
                print(f"\n{section}")
            print(f"  {finding.state:4}  {finding.what}: {finding.detail}")
    failed = [finding.what for finding in findings if finding.state == "FAIL"]
    if not args.json:
        print(f"\n{'not ready: ' + ', '.join(failed) if failed else 'ready to train'}")
    return 1 if failed else 0
