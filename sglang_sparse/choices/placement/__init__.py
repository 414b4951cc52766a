# SPDX-License-Identifier: Apache-2.0
"""The choices of the axis `placement`."""
