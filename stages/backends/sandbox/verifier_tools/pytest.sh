#!/bin/bash
exec /opt/rsi/bin/python3 -m pytest "$@"
